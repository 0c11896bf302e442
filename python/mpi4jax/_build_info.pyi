# The module itself is written by the build (setup.py).
vendor: str
version: str
found: str
