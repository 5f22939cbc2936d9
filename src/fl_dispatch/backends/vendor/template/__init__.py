"""A vendor backend to copy; see README.md beside this file."""
