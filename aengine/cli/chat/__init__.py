"""`aengine chat`: a conversation on a terminal."""
