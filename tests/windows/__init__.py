"""What Windows, its builds of torch, and Ray on it do, as far as the package relies on it; one fact a test.

Each test holds on Windows, and under Wine too unless it is skipped there with what Wine does instead.
"""
