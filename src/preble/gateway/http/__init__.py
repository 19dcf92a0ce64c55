"""HTTP towards clients: the application, its routes, bodies, and diagnostic pages."""
