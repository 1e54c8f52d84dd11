// Detections in the pictures of a camera.
"use strict";
import {draw} from "./drawing.js";

const LARGEST = 1280;
const timestamp = () => new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");

const REASONS = {
  NotAllowedError: "The camera was refused: allow it for this page in the browser's settings, and try again.",
  NotFoundError: "This machine has no camera.",
  NotReadableError: "The camera cannot be read: another program may use it.",
};
const INSECURE = "Browsers allow the camera only for pages from https or from this machine (localhost). " +
  "Choose images instead; a phone then offers to take a photograph.";

function picture(video, largest) {
  const scale = Math.min(1, largest / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise(resolve => canvas.toBlob(resolve, "image/jpeg", 0.92));
}

export class Camera {
  // `detect(blob)` returns the server's answer; `shown(detections)` those to draw.
  constructor(video, svg, detect, shown) {
    Object.assign(this, {video, svg, detect, shown, stream: null});
  }

  // Shows the camera until `stop`; returns the reason if it cannot.
  async start(pace) {
    if (!navigator.mediaDevices?.getUserMedia) return INSECURE;
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({video: {facingMode: "environment"}});
      this.video.srcObject = this.stream;
      await this.video.play();
    } catch (error) {
      this.stop();
      return REASONS[error.name] ?? `The camera does not work: ${error.message}`;
    }
    this.video.parentElement.style.setProperty("--ratio", this.video.videoWidth / this.video.videoHeight);
    this.#look(this.stream, pace);
    return "";
  }

  stop() {
    this.stream?.getTracks().forEach(track => track.stop());
    this.stream = this.video.srcObject = null;
    this.svg.replaceChildren();
  }

  // Returns the current picture as a file.
  async keep() {
    return new File([await picture(this.video, Infinity)], `camera-${timestamp()}.jpg`, {type: "image/jpeg"});
  }

  async #look(stream, pace) {
    while (this.stream === stream) {
      const begin = performance.now();
      try {
        const answer = await this.detect(await picture(this.video, LARGEST));
        if (this.stream !== stream) return;
        draw(this.svg, answer, this.shown(answer.detections));
        pace.textContent = `${((performance.now() - begin) / 1000).toFixed(2)} s a picture`;
      } catch (error) {
        pace.textContent = error.message;
        await new Promise(resolve => setTimeout(resolve, 1000));
      }
    }
  }
}
