"""The Python API: `Engine` generates, `Trainer` trains, `Drafter` makes a drafter. `docs/api.md`
says what stays stable.
"""
