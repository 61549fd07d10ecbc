"""Pages of a report: HTML by jinja2 with autoescape, and their data as local scripts."""
