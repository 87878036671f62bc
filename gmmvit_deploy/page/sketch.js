// A canvas to draw on with a mouse, a finger, a pen or the keyboard: white strokes on black, as digits are stored.
// Keys: arrows move the pen (Shift: in small steps), Space lowers or lifts it, Delete clears.
(() => {
  const WIDTH = 28;
  const STEP = 14;
  const pens = new WeakMap(); // canvas → { x, y, down, used }

  const penOf = (canvas) => {
    if (!pens.has(canvas)) {
      pens.set(canvas, { x: canvas.width / 2, y: canvas.height / 2, down: false, used: false });
      clear(canvas);
    }
    return pens.get(canvas);
  };

  const clear = (canvas) => {
    const context = canvas.getContext("2d");
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
    const pen = pens.get(canvas);
    if (pen) pen.used = false;
  };

  const stroke = (canvas, pen, x, y) => {
    const context = canvas.getContext("2d");
    context.strokeStyle = "#fff";
    context.lineWidth = WIDTH;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(pen.x, pen.y);
    context.lineTo(x, y);
    context.stroke();
    pen.used = true;
  };

  const move = (canvas, x, y) => {
    const pen = penOf(canvas);
    const inside = [Math.min(Math.max(x, 0), canvas.width), Math.min(Math.max(y, 0), canvas.height)];
    if (pen.down) stroke(canvas, pen, ...inside);
    [pen.x, pen.y] = inside;
    const mark = canvas.parentElement.querySelector(".pen");
    if (mark) {
      mark.style.left = `${(100 * pen.x) / canvas.width}%`;
      mark.style.top = `${(100 * pen.y) / canvas.height}%`;
      mark.classList.toggle("down", pen.down);
    }
  };

  const canvasOf = (event) => (event.target instanceof HTMLCanvasElement && event.target.matches(".sketch") ? event.target : null);
  const placeOf = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
  };

  document.addEventListener("pointerdown", (event) => {
    const canvas = canvasOf(event);
    if (!canvas) return;
    const pen = penOf(canvas);
    pen.down = false;
    move(canvas, ...placeOf(canvas, event));
    pen.down = true;
    move(canvas, ...placeOf(canvas, event)); // a tap leaves a dot
    canvas.setPointerCapture(event.pointerId);
    event.preventDefault();
    canvas.focus();
  });
  document.addEventListener("pointermove", (event) => {
    const canvas = canvasOf(event);
    if (canvas && event.buttons && penOf(canvas).down) move(canvas, ...placeOf(canvas, event));
  });
  for (const name of ["pointerup", "pointercancel"]) {
    document.addEventListener(name, (event) => {
      const canvas = canvasOf(event);
      if (canvas) penOf(canvas).down = false;
    });
  }
  document.addEventListener("keydown", (event) => {
    const canvas = canvasOf(event);
    if (!canvas) return;
    const pen = penOf(canvas);
    const step = event.shiftKey ? STEP / 4 : STEP;
    const steps = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in steps) move(canvas, pen.x + steps[event.key][0], pen.y + steps[event.key][1]);
    else if (event.key === " ") {
      pen.down = !pen.down;
      move(canvas, pen.x, pen.y);
    } else if (event.key === "Delete") clear(canvas);
    else return;
    event.preventDefault();
  });

  // Called by the page.  read returns the drawing as a PNG data URL, or null if the canvas is empty.
  window.gmmvitSketch = {
    read: () => {
      const canvas = document.querySelector("canvas.sketch");
      return canvas && penOf(canvas).used ? canvas.toDataURL("image/png") : null;
    },
    clear: () => {
      const canvas = document.querySelector("canvas.sketch");
      if (canvas) clear(canvas);
    },
  };
})();
