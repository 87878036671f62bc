"""Sources of the documentation site: pages, its configuration, the extension and the script that draws pictures."""
