"""The documentation site: pages, and what MkDocs does to them. `hatch run docs:build` writes it to build/docs."""
