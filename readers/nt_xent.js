// Recomputes every golden case of NT-Xent, value and gradients, from the data of the archive alone.
// Usage: node readers/nt_xent.js [golden/nt_xent.json]
"use strict";
const fs = require("fs");

// Rows [N][D] divided by their norms under cosine, and the norms; dot products leave the rows unchanged. The norm of a
// row of zeros counts as infinite: its unit vector and its gradient are 0.
function unit(rows, similarity) {
  const norms = rows.map((row) => (similarity === "dot" ? 1 : Math.hypot(...row) || Infinity));
  return [rows.map((row, i) => row.map((x) => x / norms[i])), norms];
}

const dot = (x, y) => x.reduce((sum, value, d) => sum + value * y[d], 0);
const largest = (rows) => Math.max(...rows.map((row) => Math.hypot(...row)));

// The gradient with respect to a row, from the gradient g with respect to the row divided by its norm.
function throughNorm(g, u, norm, similarity) {
  const along = similarity === "dot" ? 0 : dot(g, u);
  return g.map((x, d) => (x - along * u[d]) / norm);
}

function ntXent(rows, given, keywords) {
  const { partners, ref_embeddings: refs, self_rows: own, ignored, ignored_ids: ids, ref_ignored_ids: refIds } = given;
  const { anchors, temperature = 0.07, base_temperature: base, similarity = "cosine", reduction = "mean" } = keywords;
  const [u, normsU] = unit(rows, similarity);
  const [v, normsV] = refs ? unit(refs, similarity) : [u, normsU];
  const counted = rows.map((_, i) => i).filter((i) => !anchors || anchors[i]);
  const scale = temperature / (base ?? temperature);
  const ofAnchors = given.anchor_weights ?? rows.map(() => 1);
  const divisor = reduction === "mean" ? counted.reduce((sum, i) => sum + ofAnchors[i], 0) || 1 : 1;
  const weight = scale / divisor / temperature;
  const zeros = (matrix) => matrix.map((row) => row.map(() => 0));
  // Per row: the gradient, and the sum of the absolute values of its terms, which scales its rounding error.
  const [gu, gv, sizeU, sizeV] = [zeros(u), zeros(v), u.map(() => 0), v.map(() => 0)];
  const [lengthsU, lengthsV] = [u, v].map((rows) => rows.map((row) => Math.hypot(...row)));
  const values = counted.map((i) => {
    const leftOut = (j) => ignored?.[i][j] || (ids && j !== partners[i] && ids[i] === (refIds ?? ids)[j]);
    const members = v.map((_, j) => j).filter((j) => j !== (refs ? own?.[i] : i) && !leftOut(j));
    const logits = v.map((other) => dot(u[i], other) / temperature);
    const top = members.reduce((best, j) => (logits[j] > logits[best] ? j : best), members[0]);
    const rest = members.reduce((sum, j) => sum + (j === top ? 0 : Math.exp(logits[j] - logits[top])), 0);
    const shares = members.map((j) => Math.exp(logits[j] - logits[top]) / (1 + rest));
    const others = members.reduce((sum, j, k) => sum + (j === partners[i] ? 0 : shares[k]), 0);
    members.forEach((j, k) => {
      const c = weight * ofAnchors[i] * (j === partners[i] ? -others : shares[k]);
      for (let d = 0; d < u[i].length; d += 1) {
        gu[i][d] += c * v[j][d];
        gv[j][d] += c * u[i][d];
      }
      sizeU[i] += Math.abs(c) * lengthsV[j];
      sizeV[j] += Math.abs(c) * lengthsU[i];
    });
    return ofAnchors[i] * scale * (logits[top] - logits[partners[i]] + Math.log1p(rest));
  });
  const sum = values.reduce((total, value) => total + value, 0);
  const loss = reduction === "none" ? values : [sum / divisor];
  if (!refs) {
    gu.forEach((row, i) => row.forEach((_, d) => (row[d] += gv[i][d])));
    sizeU.forEach((_, i) => (sizeU[i] += sizeV[i]));
  }
  const finish = (g, x, norms, sizes) => [
    g.map((row, i) => throughNorm(row, x[i], norms[i], similarity)),
    sizes.map((size, i) => size / norms[i]),
  ];
  return {
    loss,
    gradient: finish(gu, u, normsU, sizeU),
    reference: refs && finish(gv, v, normsV, sizeV),
    // Rounding changes a logit by about 2^-52 of this, and a result by the same factor.
    magnitude: (largest(u) * largest(v)) / temperature,
  };
}

function check({ embeddings, arguments: given, keywords, expected }) {
  const found = ntXent(embeddings, given, keywords);
  const allowed = 1e-12 + 1e-14 * found.magnitude;
  const near = ([rows, sizes], right) =>
    rows.every((row, i) => row.every((x, d) => Math.abs(x - right[i][d]) <= allowed * sizes[i] + Number.MIN_VALUE));
  // Of a large gradient, the file has some rows, and two sums of all rows with the factors 16 + i mod 31 and 16 + i mod 37.
  const nearPart = ([rows, sizes], { rows: stored, values, products }) =>
    near([stored.map((i) => rows[i]), stored.map((i) => sizes[i])], values) &&
    [31, 37].every((period, k) => {
      const factors = rows.map((_, i) => 16 + (i % period));
      const limit = allowed * dot(factors, sizes);
      return products[k].every((x, d) => Math.abs(dot(factors, rows.map((row) => row[d])) - x) <= limit);
    });
  const agrees = (found, wanted) => (Array.isArray(wanted) ? near : nearPart)(found, wanted);
  const right = [expected.loss].flat();
  if (!found.loss.every((x, k) => Math.abs(x - right[k]) <= allowed * (Math.abs(right[k]) + 1e-300))) return "the loss";
  if (expected.gradient && !agrees(found.gradient, expected.gradient)) return "the gradient";
  const reference = expected.gradients?.ref_embeddings;
  return reference && !agrees(found.reference, reference) ? "the gradient of the references" : "";
}

let failed = 0;
const { cases } = JSON.parse(fs.readFileSync(process.argv[2] ?? "golden/nt_xent.json", "utf8"));
for (const entry of cases) {
  const wrong = check(entry);
  if (wrong) {
    failed += 1;
    console.log(`${entry.id}: ${wrong} differs; the case reveals: ${entry.flags.join(", ")}`);
  }
}
console.log(`${cases.length - failed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
