"""A real federation: sites, a server, and what they agree on."""
