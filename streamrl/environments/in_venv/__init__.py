"""What runs inside the venv of an environment: files that import nothing but the standard library and its packages."""
