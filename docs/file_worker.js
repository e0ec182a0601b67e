// Browsers start no Worker for a page that was opened from a folder. There, the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>self.postMessage = (data) => parent.postMessage(data, "*");<\/script><script src="${url}"><\/script>`;
      this.loaded = new Promise((done) => { frame.onload = () => done(frame.contentWindow); });
      addEventListener("message", ({ source, data }) => {
        if (source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.loaded.then((worker) => worker.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
