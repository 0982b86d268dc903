"""Messages as bytes, and back."""
