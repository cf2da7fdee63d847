"""A module beside stock_script.py, which its workers import."""


def answer():
    return 42
