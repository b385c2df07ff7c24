// Recomputes every golden case of NT-Xent, value and gradients, from the data of the archive alone.
// Build and run: rustc --edition 2021 -O readers/nt_xent.rs -o nt_xent && ./nt_xent [golden/nt_xent.json]
use std::collections::HashMap;
use std::process::ExitCode;

/// A JSON value.
enum Json {
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(HashMap<String, Json>),
}

impl Json {
    /// The field of an object, unless it is absent or null.
    fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(fields) => fields.get(key).filter(|field| !matches!(field, Json::Null)),
            _ => None,
        }
    }

    /// A field that every case has.
    fn field(&self, key: &str) -> &Json {
        self.get(key).unwrap_or_else(|| panic!("a case lacks {key}"))
    }

    fn items(&self) -> &[Json] {
        match self {
            Json::List(items) => items,
            _ => &[],
        }
    }

    fn text(&self) -> &str {
        match self {
            Json::Text(text) => text,
            _ => "",
        }
    }

    fn number(&self) -> f64 {
        match self {
            Json::Number(number) => *number,
            _ => f64::NAN,
        }
    }

    fn is_true(&self) -> bool {
        matches!(self, Json::Bool(true))
    }

    fn row(&self) -> Vec<f64> {
        self.items().iter().map(Json::number).collect()
    }

    fn matrix(&self) -> Vec<Vec<f64>> {
        self.items().iter().map(Json::row).collect()
    }
}

struct Parser<'a> {
    source: &'a [u8],
    at: usize,
}

impl Parser<'_> {
    /// Skip spaces, commas and colons: in valid JSON, the order of values says what they separate.
    fn skip(&mut self) -> u8 {
        while b" \n\r\t,:".contains(&self.source[self.at]) {
            self.at += 1;
        }
        self.source[self.at]
    }

    fn token(&mut self, ends: impl Fn(u8) -> bool) -> String {
        let start = self.at;
        while !ends(self.source[self.at]) {
            self.at += if self.source[self.at] == b'\\' { 2 } else { 1 };
        }
        String::from_utf8_lossy(&self.source[start..self.at]).into_owned()
    }

    fn parse(&mut self) -> Json {
        match self.skip() {
            b'{' => {
                let mut fields = HashMap::new();
                self.at += 1;
                while self.skip() != b'}' {
                    let key = self.parse().text().to_owned();
                    fields.insert(key, self.parse());
                }
                self.at += 1;
                Json::Object(fields)
            }
            b'[' => {
                let mut items = Vec::new();
                self.at += 1;
                while self.skip() != b']' {
                    items.push(self.parse());
                }
                self.at += 1;
                Json::List(items)
            }
            b'"' => {
                self.at += 1;
                let text = self.token(|byte| byte == b'"');
                self.at += 1;
                Json::Text(text)
            }
            _ => match self.token(|byte| b" \n\r\t,:]}".contains(&byte)).as_str() {
                "null" => Json::Null,
                "true" => Json::Bool(true),
                "false" => Json::Bool(false),
                number => Json::Number(number.parse().expect("a number of JSON")),
            },
        }
    }
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(a, b)| a * b).sum()
}

/// The Euclidean norm, without overflow or underflow of the squares.
fn norm(x: &[f64]) -> f64 {
    let top = x.iter().fold(0.0, |top: f64, value| top.max(value.abs()));
    if top == 0.0 {
        return 0.0;
    }
    top * x.iter().map(|value| (value / top).powi(2)).sum::<f64>().sqrt()
}

/// Rows divided by their norms under cosine; dot products leave them unchanged. The norm of a row of zeros counts as
/// infinite: its unit vector and its gradient are 0.
struct Side {
    unit: Vec<Vec<f64>>,
    norms: Vec<f64>,
    gradient: Vec<Vec<f64>>,
    /// Per row, the sum of the absolute values of the gradient's terms, which scales its rounding error.
    terms: Vec<f64>,
}

impl Side {
    fn new(rows: Vec<Vec<f64>>, cosine: bool) -> Side {
        let norms: Vec<f64> = rows.iter().map(|row| if !cosine { 1.0 } else if norm(row) == 0.0 { f64::INFINITY } else { norm(row) }).collect();
        let divide = |(row, norm): (&Vec<f64>, &f64)| row.iter().map(|x| x / norm).collect();
        let unit: Vec<Vec<f64>> = rows.iter().zip(&norms).map(divide).collect();
        let gradient = unit.iter().map(|row| vec![0.0; row.len()]).collect();
        Side { gradient, terms: vec![0.0; unit.len()], unit, norms }
    }

    fn largest(&self) -> f64 {
        self.unit.iter().map(|row| norm(row)).fold(0.0, f64::max)
    }

    fn add(&mut self, i: usize, c: f64, other: &[f64]) {
        self.gradient[i].iter_mut().zip(other).for_each(|(x, y)| *x += c * y);
        self.terms[i] += c.abs() * norm(other);
    }

    /// The gradient of row i.
    fn row(&self, i: usize, cosine: bool) -> Vec<f64> {
        let (g, u) = (&self.gradient[i], &self.unit[i]);
        let along = if cosine { dot(g, u) } else { 0.0 };
        g.iter().zip(u).map(|(g, u)| (g - along * u) / self.norms[i]).collect()
    }

    fn near(&self, right: &Json, allowed: f64, cosine: bool) -> bool {
        let part = right.get("rows").map(|rows| (rows.row(), right.field("products").matrix()));
        let values = right.get("values").unwrap_or(right).matrix();
        let limit = |i: usize| allowed * self.terms[i] / self.norms[i];
        let near = |found: &[f64], right: &[f64], limit: f64| found.iter().zip(right).all(|(x, y)| (x - y).abs() <= limit);
        let rows = values.iter().enumerate().all(|(k, value)| {
            let i = part.as_ref().map_or(k, |(rows, _)| rows[k] as usize);
            near(&self.row(i, cosine), value, limit(i) + f64::from_bits(1))
        });
        // Of a large gradient, the file has some rows, and two sums of all rows with the factors 16 + i mod 31 and
        // 16 + i mod 37.
        rows && part.is_none_or(|(_, products)| {
            products.iter().zip([31, 37]).all(|(product, period)| {
                let (mut sums, mut allowed) = (vec![0.0; product.len()], 0.0);
                for i in 0..self.unit.len() {
                    let factor = (16 + i % period) as f64;
                    sums.iter_mut().zip(self.row(i, cosine)).for_each(|(sum, x)| *sum += factor * x);
                    allowed += factor * limit(i);
                }
                near(&sums, product, allowed)
            })
        })
    }
}

/// What differs from the expected results, if anything.
fn check(case: &Json) -> Option<&'static str> {
    let (given, keywords, expected) = (case.field("arguments"), case.field("keywords"), case.field("expected"));
    let partners: Vec<usize> = given.field("partners").row().iter().map(|&p| p as usize).collect();
    let number = |key: &str, other: f64| keywords.get(key).map_or(other, Json::number);
    let temperature = number("temperature", 0.07);
    let scale = temperature / number("base_temperature", temperature);
    let cosine = keywords.get("similarity").is_none_or(|word| word.text() == "cosine");
    let reduction = keywords.get("reduction").map_or("mean", Json::text);
    let ids = given.get("ignored_ids").map(Json::row);
    let other_ids = given.get("ref_ignored_ids").map(Json::row).or_else(|| ids.clone());

    let mut rows = Side::new(case.field("embeddings").matrix(), cosine);
    let mut references = given.get("ref_embeddings").map(|matrix| Side::new(matrix.matrix(), cosine));
    let columns = references.as_ref().unwrap_or(&rows).unit.clone();
    let units = rows.unit.clone();

    let is_anchor = |i: &usize| keywords.get("anchors").is_none_or(|anchors| anchors.items()[*i].is_true());
    let anchors: Vec<usize> = (0..units.len()).filter(is_anchor).collect();
    let of_anchors = given.get("anchor_weights").map_or(vec![1.0; units.len()], Json::row);
    let total: f64 = anchors.iter().map(|&i| of_anchors[i]).sum();
    let divisor = if reduction == "mean" && total > 0.0 { total } else { 1.0 };
    let weight = scale / divisor / temperature;

    let mut values = Vec::new();
    for &i in &anchors {
        let own = match (&references, given.get("self_rows")) {
            (None, _) => i as f64,
            (Some(_), selves) => selves.map_or(-1.0, |selves| selves.items()[i].number()),
        };
        let left_out = |j: usize| {
            let ignored = given.get("ignored").is_some_and(|mask| mask.items()[i].items()[j].is_true());
            let same = ids.as_ref().zip(other_ids.as_ref()).is_some_and(|(a, b)| a[i] == b[j]);
            ignored || (same && j != partners[i])
        };
        let members: Vec<usize> = (0..columns.len()).filter(|&j| j as f64 != own && !left_out(j)).collect();
        let logits: Vec<f64> = columns.iter().map(|other| dot(&units[i], other) / temperature).collect();
        let larger = |a, b| if logits[b] > logits[a] { b } else { a };
        let top = members.iter().copied().reduce(larger).expect("the partner is a member");
        let relative = |j: usize| (logits[j] - logits[top]).exp();
        let rest: f64 = members.iter().filter(|&&j| j != top).map(|&j| relative(j)).sum();
        let share = |j: usize| relative(j) / (1.0 + rest);
        let others: f64 = members.iter().filter(|&&j| j != partners[i]).map(|&j| share(j)).sum();
        for &j in &members {
            let c = weight * of_anchors[i] * if j == partners[i] { -others } else { share(j) };
            rows.add(i, c, &columns[j]);
            references.as_mut().unwrap_or(&mut rows).add(j, c, &units[i]);
        }
        values.push(of_anchors[i] * scale * (logits[top] - logits[partners[i]] + rest.ln_1p()));
    }

    // Rounding changes a logit by about 2^-52 of the largest possible logit, and a result by the same factor.
    let other_largest = references.as_ref().unwrap_or(&rows).largest();
    let allowed = 1e-12 + 1e-14 * rows.largest() * other_largest / temperature;
    let loss = if reduction == "none" { values } else { vec![values.iter().sum::<f64>() / divisor] };
    let right = match expected.field("loss") {
        Json::List(items) => items.iter().map(Json::number).collect(),
        value => vec![value.number()],
    };
    let near = |(x, y): (&f64, &f64)| (x - y).abs() <= allowed * (y.abs() + 1e-300);
    if loss.len() != right.len() || !loss.iter().zip(&right).all(near) {
        return Some("the loss");
    }
    if expected.get("gradient").is_some_and(|right| !rows.near(right, allowed, cosine)) {
        return Some("the gradient");
    }
    let right = expected.get("gradients").and_then(|all| all.get("ref_embeddings"));
    match (references, right) {
        (Some(side), Some(right)) if !side.near(right, allowed, cosine) => Some("the gradient of the references"),
        _ => None,
    }
}

fn main() -> ExitCode {
    let path = std::env::args().nth(1).unwrap_or_else(|| "golden/nt_xent.json".to_owned());
    let Ok(source) = std::fs::read(&path) else {
        eprintln!("{path} cannot be read");
        return ExitCode::from(3);
    };
    let data = Parser { source: &source, at: 0 }.parse();
    let cases = data.field("cases").items();
    let mut failed = 0;
    for case in cases {
        if let Some(wrong) = check(case) {
            failed += 1;
            let flags: Vec<&str> = case.field("flags").items().iter().map(Json::text).collect();
            println!("{}: {wrong} differs; the case reveals: {}", case.field("id").text(), flags.join(", "));
        }
    }
    println!("{} passed, {failed} failed", cases.len() - failed);
    ExitCode::from(u8::from(failed > 0))
}
