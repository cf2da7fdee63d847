"""The decision on a start: pure functions over what the workers reported. Standard library only.

`table.decide_start` chooses backend and devices, `rendezvous.plan_rendezvous` addresses and interfaces; `plan` has what comes out.
"""
