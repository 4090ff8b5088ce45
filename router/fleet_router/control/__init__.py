"""The control process: its HTTP port and discovery."""
