"""Routes a prompt to the replica that has its prefix cached, unless computing it elsewhere is faster."""
