// Recomputes every golden case of NT-Xent, value and gradients, from the data of the archive alone.
// Build and run: c++ -std=c++17 -O2 readers/nt_xent.cpp -o nt_xent && ./nt_xent [golden/nt_xent.json]
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

// A JSON value. The files contain neither comments nor escapes other than those of JSON.
struct Json {
    enum Kind { null, boolean, number, text, list, object } kind = null;
    double value = 0;
    std::string words;
    std::vector<Json> items;
    std::map<std::string, Json> fields;

    bool has(const std::string& key) const { return fields.count(key) != 0 && fields.at(key).kind != null; }
    const Json& operator[](const std::string& key) const { return fields.at(key); }
    double number_or(const std::string& key, double other) const { return has(key) ? fields.at(key).value : other; }
    std::string text_or(const std::string& key, const char* other) const {
        return has(key) ? fields.at(key).words : other;
    }
};

class Parser {
public:
    explicit Parser(const std::string& source) : source_(source) {}

    Json parse() {
        skip();
        Json found;
        const char first = source_.at(at_);
        if (first == '{' || first == '[') {
            found.kind = first == '{' ? Json::object : Json::list;
            const char last = first == '{' ? '}' : ']';
            ++at_;
            for (skip(); source_.at(at_) != last; skip()) {
                if (first == '[') {
                    found.items.push_back(parse());
                } else {
                    const std::string key = parse().words;
                    found.fields[key] = parse();
                }
            }
            ++at_;
        } else if (first == '"') {
            found.kind = Json::text;
            for (++at_; source_.at(at_) != '"'; ++at_) {
                if (source_[at_] == '\\') found.words += source_[at_++];
                found.words += source_.at(at_);
            }
            ++at_;
        } else if (std::isalpha(static_cast<unsigned char>(first))) {
            const std::size_t start = at_;
            while (std::isalpha(static_cast<unsigned char>(source_.at(at_)))) ++at_;
            found.kind = first == 'n' ? Json::null : Json::boolean;
            found.value = source_.compare(start, 4, "true") == 0;
        } else {
            const char* start = source_.c_str() + at_;
            char* end = nullptr;
            found.kind = Json::number;
            found.value = std::strtod(start, &end);
            if (end == start) throw std::runtime_error("not JSON at byte " + std::to_string(at_));
            at_ += static_cast<std::size_t>(end - start);
        }
        return found;
    }

private:
    // Skip spaces, commas and colons: in valid JSON, the order of values says what they separate.
    void skip() { at_ = source_.find_first_not_of(" \n\r\t,:", at_); }

    const std::string& source_;
    std::size_t at_ = 0;
};

using Row = std::vector<double>;
using Matrix = std::vector<Row>;

Row numbers(const Json& list) {
    Row found;
    for (const Json& item : list.items) found.push_back(item.value);
    return found;
}

Matrix matrix(const Json& list) {
    Matrix found;
    for (const Json& item : list.items) found.push_back(numbers(item));
    return found;
}

double dot(const Row& x, const Row& y) {
    double sum = 0;
    for (std::size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
    return sum;
}

// The Euclidean norm, without overflow or underflow of the squares.
double norm(const Row& x) {
    double top = 0, sum = 0;
    for (double value : x) top = std::max(top, std::abs(value));
    for (double value : x) sum += (value / top) * (value / top);
    return top == 0 ? 0 : top * std::sqrt(sum);
}

// Rows divided by their norms under cosine; dot products leave them unchanged. The norm of a row of zeros counts as
// infinite: its unit vector and its gradient are 0. `terms` is the sum of the absolute
// values of the terms of a row's gradient, which scales its rounding error.
struct Side {
    Matrix unit, gradient;
    Row norms, terms;

    Side(const Matrix& rows, bool cosine) : unit(rows), gradient(rows), norms(rows.size(), 1), terms(rows.size(), 0) {
        for (std::size_t i = 0; i < rows.size(); ++i) {
            if (cosine) norms[i] = norm(rows[i]) > 0 ? norm(rows[i]) : INFINITY;
            for (double& x : unit[i]) x /= norms[i];
            std::fill(gradient[i].begin(), gradient[i].end(), 0.0);
        }
    }

    double largest() const {
        double found = 0;
        for (const Row& row : unit) found = std::max(found, norm(row));
        return found;
    }

    void add(std::size_t i, double c, const Row& other) {
        for (std::size_t d = 0; d < other.size(); ++d) gradient[i][d] += c * other[d];
        terms[i] += std::abs(c) * norm(other);
    }

    // Entry d of the gradient of row i.
    double entry(std::size_t i, std::size_t d, bool cosine) const {
        return (gradient[i][d] - (cosine ? dot(gradient[i], unit[i]) * unit[i][d] : 0)) / norms[i];
    }

    bool near(const Json& right, double allowed, bool cosine) const {
        const bool part = right.kind == Json::object;
        const Matrix values = matrix(part ? right["values"] : right);
        for (std::size_t k = 0; k < values.size(); ++k) {
            const std::size_t i = part ? static_cast<std::size_t>(right["rows"].items[k].value) : k;
            const double limit = allowed * terms[i] / norms[i] + std::numeric_limits<double>::denorm_min();
            for (std::size_t d = 0; d < values[k].size(); ++d)
                if (!(std::abs(entry(i, d, cosine) - values[k][d]) <= limit)) return false;
        }
        return !part || near_products(matrix(right["products"]), allowed, cosine);
    }

    // Of a large gradient, the file has some rows, and two sums of all rows with the factors 16 + i mod 31 and 16 + i mod 37.
    bool near_products(const Matrix& right, double allowed, bool cosine) const {
        for (std::size_t k = 0; k < right.size(); ++k) {
            Row sums(right[k].size(), 0);
            double limit = 0;
            for (std::size_t i = 0; i < unit.size(); ++i) {
                const double factor = static_cast<double>(16 + i % (k == 0 ? 31 : 37));
                limit += factor * allowed * terms[i] / norms[i];
                for (std::size_t d = 0; d < sums.size(); ++d) sums[d] += factor * entry(i, d, cosine);
            }
            for (std::size_t d = 0; d < sums.size(); ++d)
                if (!(std::abs(sums[d] - right[k][d]) <= limit)) return false;
        }
        return true;
    }
};

// Returns what differs from the expected results, or "".
std::string check(const Json& entry) {
    const Json &given = entry["arguments"], &keywords = entry["keywords"], &expected = entry["expected"];
    const Row partners = numbers(given["partners"]);
    const bool referring = given.has("ref_embeddings"), identified = given.has("ignored_ids");
    const double temperature = keywords.number_or("temperature", 0.07);
    const double scale = temperature / keywords.number_or("base_temperature", temperature);
    const bool cosine = keywords.text_or("similarity", "cosine") == "cosine";
    const std::string reduction = keywords.text_or("reduction", "mean");
    const Row ids = identified ? numbers(given["ignored_ids"]) : Row();
    const Row other_ids = given.has("ref_ignored_ids") ? numbers(given["ref_ignored_ids"]) : ids;

    Side rows(matrix(entry["embeddings"]), cosine);
    Side references(referring ? matrix(given["ref_embeddings"]) : Matrix(), cosine);
    Side& columns = referring ? references : rows;

    std::vector<std::size_t> anchors;
    for (std::size_t i = 0; i < rows.unit.size(); ++i)
        if (!keywords.has("anchors") || keywords["anchors"].items[i].value != 0) anchors.push_back(i);
    const Row of_anchors = given.has("anchor_weights") ? numbers(given["anchor_weights"]) : Row(rows.unit.size(), 1);
    double total = 0;
    for (std::size_t i : anchors) total += of_anchors[i];
    const double divisor = reduction == "mean" && total > 0 ? total : 1;
    const double weight = scale / divisor / temperature;

    Row values;
    for (std::size_t i : anchors) {
        const auto partner = static_cast<std::size_t>(partners[i]);
        const double own = referring ? (given.has("self_rows") ? given["self_rows"].items[i].value : -1)
                                     : static_cast<double>(i);
        std::vector<std::size_t> members;
        Row logits(columns.unit.size());
        for (std::size_t j = 0; j < columns.unit.size(); ++j) {
            logits[j] = dot(rows.unit[i], columns.unit[j]) / temperature;
            const bool ignored = given.has("ignored") && given["ignored"].items[i].items[j].value != 0;
            const bool same = identified && j != partner && ids[i] == other_ids[j];
            if (static_cast<double>(j) != own && !ignored && !same) members.push_back(j);
        }
        std::size_t top = members.at(0);
        for (std::size_t j : members)
            if (logits[j] > logits[top]) top = j;
        double rest = 0, others = 0;
        for (std::size_t j : members)
            if (j != top) rest += std::exp(logits[j] - logits[top]);
        const auto share = [&](std::size_t j) { return std::exp(logits[j] - logits[top]) / (1 + rest); };
        for (std::size_t j : members)
            if (j != partner) others += share(j);
        for (std::size_t j : members) {
            const double c = weight * of_anchors[i] * (j == partner ? -others : share(j));
            rows.add(i, c, columns.unit[j]);
            columns.add(j, c, rows.unit[i]);
        }
        values.push_back(of_anchors[i] * scale * (logits[top] - logits[partner] + std::log1p(rest)));
    }

    // Rounding changes a logit by about 2^-52 of the largest possible logit, and a result by the same factor.
    const double allowed = 1e-12 + 1e-14 * rows.largest() * columns.largest() / temperature;
    double sum = 0;
    for (double value : values) sum += value;
    const Row loss = reduction == "none" ? values : Row{sum / divisor};
    const Row right = expected["loss"].kind == Json::list ? numbers(expected["loss"]) : Row{expected["loss"].value};
    for (std::size_t k = 0; k < loss.size(); ++k)
        if (!(std::abs(loss[k] - right.at(k)) <= allowed * (std::abs(right[k]) + 1e-300))) return "the loss";
    if (expected.has("gradient") && !rows.near(expected["gradient"], allowed, cosine)) return "the gradient";
    if (referring && expected.has("gradients") &&
        !references.near(expected["gradients"]["ref_embeddings"], allowed, cosine))
        return "the gradient of the references";
    return "";
}

int main(int count, char** arguments) {
    const char* path = count > 1 ? arguments[1] : "golden/nt_xent.json";
    std::ifstream file(path);
    if (!file) {
        std::cerr << path << " cannot be read\n";
        return 3;
    }
    const std::string source((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const Json data = Parser(source).parse();
    int passed = 0, failed = 0;
    for (const Json& entry : data["cases"].items) {
        const std::string wrong = check(entry);
        if (wrong.empty()) {
            ++passed;
            continue;
        }
        ++failed;
        std::cout << entry["id"].words << ": " << wrong << " differs; the case reveals:";
        for (const Json& flag : entry["flags"].items) std::cout << " " << flag.words;
        std::cout << "\n";
    }
    std::cout << passed << " passed, " << failed << " failed\n";
    return failed ? 1 : 0;
}
