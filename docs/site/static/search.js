// Opens the search of this language's pages, with the words of the address. In the index of the Chinese
// pages each character is a word (`indexing.py`), so a Chinese query searches for its characters in order.
const HAN = "\\p{Script=Han}";
const query = (words) => {
  const spaced = words.trim().replace(new RegExp(`(?<=${HAN})\\s*(?=${HAN})`, "gu"), " ");
  return new RegExp(`^(${HAN}\\s?)+$`, "u").test(spaced) ? `"${spaced}"` : spaced;
};
const joined = (text) =>
  text.replace(new RegExp(`(?<=${HAN}(</mark>)?) (?=(<mark>)?${HAN})`, "gu"), "").replaceAll("</mark><mark>", "");
const shown = (result) => {
  result.excerpt = joined(result.excerpt);
  if (result.meta?.title) result.meta.title = joined(result.meta.title);
  if (result.title) result.title = joined(result.title);
  result.sub_results?.forEach(shown);
  return result;
};
const search = new PagefindUI({
  element: "#search", showImages: false, showSubResults: true, processTerm: query, processResult: shown,
});
const words = new URLSearchParams(location.search).get("q");
if (words) search.triggerSearch(words);
