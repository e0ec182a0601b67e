"""Settings: typed sections (schema.py) read from YAML with `a.b=v` overrides (load.py). Imports no
torch.
"""
