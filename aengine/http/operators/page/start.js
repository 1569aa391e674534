// Starts the page, after all other scripts.

fitQuestion();
showList();
reopen();
watchEngine();
