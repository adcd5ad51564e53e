// Opens the search of this language's pages, with the words of the address.
const search = new PagefindUI({ element: "#search", showImages: false, showSubResults: true });
const words = new URLSearchParams(location.search).get("q");
if (words) search.triggerSearch(words);
