"""Results as JSON, text, pages and pictures. Knows no command."""
