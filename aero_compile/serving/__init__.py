"""Private logits as a service: a server with the weights, several clients with their tokens, one port."""
