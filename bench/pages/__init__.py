"""Writes the generated parts of README.md, docs/ and techniques/README.md."""
