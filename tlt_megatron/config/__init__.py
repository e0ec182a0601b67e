"""Settings: typed sections (schema.py) read from YAML (load.py). Imports no torch."""
