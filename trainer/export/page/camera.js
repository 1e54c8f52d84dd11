// Detections in what a camera sees, one picture after the other.
"use strict";
import {draw} from "./drawing.js";

const LARGEST = 1280;

export function missing() {
  if (navigator.mediaDevices?.getUserMedia) return "";
  return window.isSecureContext
    ? "This browser gives pages no camera. Choose images instead; a phone then offers to take a photograph."
    : "A browser gives the camera to pages of https or of this machine (localhost) alone, and this page came over " +
      "plain http from another one. Choose images instead; a phone then offers to take a photograph.";
}

function reason(error) {
  if (error.name === "NotAllowedError")
    return "The camera was refused: allow it for this page in the browser's settings, and try again.";
  if (error.name === "NotFoundError") return "This machine has no camera.";
  if (error.name === "NotReadableError") return "The camera cannot be read: another program may use it.";
  return `The camera does not work: ${error.message}`;
}

function picture(video, largest) {
  const scale = Math.min(1, largest / Math.max(video.videoWidth, video.videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(video.videoWidth * scale);
  canvas.height = Math.round(video.videoHeight * scale);
  canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
  return new Promise(resolve => canvas.toBlob(resolve, "image/jpeg", 0.92));
}

export class Camera {
  // `detect(blob)` returns what the server answers; `shown(detections)` those to be drawn.
  constructor(video, svg, detect, shown) {
    Object.assign(this, {video, svg, detect, shown, stream: null});
  }

  // Shows the camera until `stop`; returns a sentence where that cannot be.
  async start(pace) {
    const none = missing();
    if (none) return none;
    try {
      this.stream = await navigator.mediaDevices.getUserMedia({video: {facingMode: "environment"}});
      this.video.srcObject = this.stream;
      await this.video.play();
    } catch (error) {
      this.stop();
      return reason(error);
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

  // The picture that is to be seen, as a file.
  async keep() {
    const time = new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-");
    return new File([await picture(this.video, Infinity)], `camera-${time}.jpg`, {type: "image/jpeg"});
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
