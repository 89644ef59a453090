"""What passes between server and client: connections, messages, what is agreed, and where SPU's bytes are led."""
