// The page begins: everything is in place.

fitQuestion();
showList();
reopen();
watchEngine();
