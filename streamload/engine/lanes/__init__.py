"""How blocks reach one kind of device."""
