"""The RL loop and what it is made of; build.py is the only place where packages are put together."""
