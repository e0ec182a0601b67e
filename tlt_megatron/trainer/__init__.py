"""The RL loop and its parts. build.py is the only module that assembles all packages."""
