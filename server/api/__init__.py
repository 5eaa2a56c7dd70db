"""HTTP: the application, its routes, wire types, errors and server-sent events."""
