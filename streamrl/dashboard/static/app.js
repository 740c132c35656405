// Chooses the page by the address behind '#', and keeps the head of the page and its keys.
import { curvesPage } from "./curves_page.js";
import { element } from "./dom.js";
import { runsPage } from "./runs_page.js";
import { groupPage, samplePage } from "./sample_page.js";
import { samplesPage } from "./samples_page.js";
import { statePage } from "./state_page.js";
import { timelinePage } from "./timeline_page.js";

const PAGES = { state: statePage, curves: curvesPage, timeline: timelinePage, samples: samplesPage, sample: samplePage, group: groupPage };
const TABS = ["state", "curves", "timeline", "samples"];
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const help = document.getElementById("help");
let leave = () => {};
let run = null;

function route() {
  const [path, text] = location.hash.replace(/^#/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const query = new URLSearchParams(text ?? "");
  leave();
  run = parts[0] === "run" ? parts[1] : null;
  const name = parts[2] ?? "state";
  document.title = run ? `${run}: ${name} – StreamRL` : "StreamRL dashboard";
  tabs.replaceChildren(...(run ? [element("strong", {}, run), ...TABS.map((tab) => element("a", { href: address(tab), "aria-current": tab === name ? "page" : null }, tab))] : []));
  if (!run) leave = runsPage(main, query);
  else if (Object.hasOwn(PAGES, name)) leave = PAGES[name](main, run, query);
  else {
    main.replaceChildren(element("p", { class: "notice bad" }, "There is no such page."));
    leave = () => {};
  }
  scrollTo(0, 0);
}

const address = (tab) => `#/run/${encodeURIComponent(run)}/${tab}`;

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "g") location.hash = "#/";
  else if (event.key === "?") help.showModal();
  else if (run && tab) location.hash = address(tab);
  else if (event.key === "Escape" && /\/(sample|group)\?/.test(location.hash)) history.back();
});
document.getElementById("help-button").addEventListener("click", () => help.showModal());
addEventListener("hashchange", route);
addEventListener("unhandledrejection", (event) => console.error(event.reason));
route();
