// Pass files that are chosen, dropped anywhere on the page, or pasted to the hidden uploader of the library, which checks
// their size and sends them.
(() => {
  const send = (files) => {
    const uploader = document.querySelector(".try .upload");
    if (uploader && files.length) getElement(Number(uploader.id.slice(1))).$refs.qRef.addFiles([files[0]]);
  };

  document.addEventListener("change", (event) => {
    if (!event.target.matches(".try input.choose")) return;
    send([...event.target.files]);
    event.target.value = ""; // so that the same file can be chosen again
  });
  document.addEventListener("paste", (event) => send([...event.clipboardData.files]));
  for (const name of ["dragover", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault(); // otherwise the browser would leave the page to show the file
      if (name === "drop") send([...event.dataTransfer.files]);
    });
  }
})();
