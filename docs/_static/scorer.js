// Rank the results of the search: pages that say how to do something before those that say what changed and why.
const PLACES = [
  [/^(tutorial|how-to\/)/, 30],
  [/^(index|faq|troubleshooting|reference\/cli)/, 10],
  [/^reference\/(dcp-scenarios|strict-exports|resumed-jobs)/, -10],
  [/^(changelog|explanation\/decisions)/, -40],
];
var Scorer = {
  score: ([page, , , , score]) =>
    score + PLACES.reduce((sum, [pattern, more]) => sum + (pattern.test(page) ? more : 0), 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 40,
  partialTitle: 15,
  term: 5,
  partialTerm: 2,
};
