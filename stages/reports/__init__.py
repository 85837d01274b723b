"""Reports of commands, as web pages and files. `pages` is what all of them are made of."""
