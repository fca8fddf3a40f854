//! Reads the Prometheus text format, as far as gauges of engines need it.

/// One line of an exposition: `name{labels} value`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    pub value: f64,
}

impl Sample<'_> {
    /// The value of a label as written (escapes are kept: nothing that is read here holds any).
    pub(super) fn label(&self, wanted: &str) -> Option<&str> {
        let mut rest = self.labels;
        loop {
            let (key, tail) = rest.split_once("=\"")?;
            let end = closing_quote(tail)?;
            if key.trim_start_matches([',', ' ']).trim_end() == wanted {
                return Some(&tail[..end]);
            }
            rest = &tail[end + 1..];
        }
    }

    /// A label that holds a number; `None` also for the word None, which Python engines print for what is not set.
    pub(super) fn number(&self, wanted: &str) -> Option<u64> {
        self.label(wanted)?.parse().ok()
    }
}

/// A page of metrics.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a>(&'a str);

impl<'a> Page<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Page(text)
    }

    /// The samples of one metric. Lines that are not samples are passed over.
    pub(super) fn samples(self, name: &'static str) -> impl Iterator<Item = Sample<'a>> {
        // Most lines of a page are histograms of other metrics: they are told apart by their beginning and never taken to pieces.
        self.0.lines().filter_map(move |line| parse(line.strip_prefix(name)?, name))
    }

    /// Whether any metric's name begins with `prefix`.
    pub(super) fn mentions(self, prefix: &str) -> bool {
        self.0.lines().any(|line| line.starts_with(prefix))
    }
}

/// What follows the name in a line.
fn parse<'a>(rest: &'a str, name: &'static str) -> Option<Sample<'a>> {
    let (labels, value) = match rest.strip_prefix('{') {
        Some(tail) => {
            let mut end = 0;
            // A brace may stand inside a quoted value.
            loop {
                let next = end + tail[end..].find(['"', '}'])?;
                if tail.as_bytes()[next] == b'}' {
                    break (&tail[..next], &tail[next + 1..]);
                }
                end = next + 1 + closing_quote(&tail[next + 1..])? + 1;
            }
        }
        // Anything but a space here belongs to a longer name.
        None => ("", rest.strip_prefix([' ', '\t'])?),
    };
    // A timestamp may follow the value.
    let value = value.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// Where the quoted text ends that `text` begins in.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP a:x Things\n# TYPE a:x gauge\na:x{engine=\"0\",model_name=\"m,}\\\"=\"} 3.0\na:x{engine=\"1\"} 4 1700000000000\na:x_total 99\na:y 0.5\na:n NaN\nbroken{\na:x{open=\"\n";

    #[test]
    fn samples_with_and_without_labels() {
        let page = Page::new(PAGE);
        let x: Vec<_> = page.samples("a:x").map(|sample| (sample.label("engine").map(str::to_owned), sample.value)).collect();
        assert_eq!(x, [(Some("0".into()), 3.0), (Some("1".into()), 4.0)]);
        assert_eq!(page.samples("a:y").next().map(|sample| sample.value), Some(0.5));
        assert!(page.samples("a:n").next().is_some_and(|sample| sample.value.is_nan()));
        assert_eq!(page.samples("broken").count(), 0);
    }

    #[test]
    fn labels_may_hold_anything() {
        let sample = Page::new(PAGE).samples("a:x").next().unwrap();
        assert_eq!(sample.label("model_name"), Some("m,}\\\"="));
        assert_eq!(sample.label("gine"), None);
        assert_eq!(sample.number("engine"), Some(0));
    }

    #[test]
    fn prefixes() {
        assert!(Page::new(PAGE).mentions("a:"));
        assert!(!Page::new(PAGE).mentions("vllm:"));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_without_panic(text in "(a:x[{} ,=\"\\\\a0\n]{0,20}|\\PC{0,10})*") {
            for sample in Page::new(&text).samples("a:x") {
                _ = (sample.label("a"), sample.number("a"));
            }
        }
    }
}
