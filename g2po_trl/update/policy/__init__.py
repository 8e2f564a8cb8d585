"""One policy: what trains is compared, by numbers, with what plays and with its reference; an adapter's reference."""
