"""What the benches of the gateway share: contenders in front of one trivial upstream, and the load on them."""
