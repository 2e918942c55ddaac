// Sets the chosen theme before the first paint; a module would come after it.
(() => {
  try {
    const theme = localStorage.getItem("mlxlite-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be switched off; then the system's theme is used.
  }
})();
