"""The language of the six words: clients, servers, messages, methods, and the types everybody shares."""
