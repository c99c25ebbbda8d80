"""Links between routers and engines: sessions, discovery, and both of their ends."""
