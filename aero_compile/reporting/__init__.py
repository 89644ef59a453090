"""What is measured, as tables, charts and pages."""
