// A classic script in the head: the chosen theme is there before the first paint.
{
  const theme = localStorage.getItem("tidemill.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
