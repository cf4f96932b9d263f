// A button on each block of code copies it. Where the browser gives no clipboard (a page over plain HTTP), there is none.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return;
  for (const block of document.querySelectorAll("div.highlight > pre")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 2000);
    });
    block.parentElement.append(button);
  }
});
