// Search runs in a worker, and browsers load no worker from file://. There, play one in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      const home = new URL(address, location.href);
      const load = (source) =>
        new Promise((done, failed) => {
          const script = this.inner.document.createElement("script");
          script.src = new URL(source, home).href;
          script.onload = done;
          script.onerror = failed;
          this.inner.document.body.append(script);
        });
      this.inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(home);
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  };
}
