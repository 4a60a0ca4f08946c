"""Every table and summary that a program writes: declared once, written whole, read back."""
