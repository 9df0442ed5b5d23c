"""Results as JSON, text and pages. Knows no command."""
