//! Recorded workloads: CSV with a header, or the gateway's access log as JSON; plain or gzipped.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use super::super::Job;
use crate::config::reading::{ConfigError, Problem};
use crate::scheduler::{Score, Tokens};

/// The columns that are needed.
const NEEDED: [&str; 3] = ["arrival_s", "prompt_tokens", "output_tokens"];
/// Those that may be there.
const SCORE: &str = "score";
const LIMIT: &str = "max_tokens";

/// Reads the requests of a trace, by arrival.
///
/// # Errors
/// It cannot be read, or a line of it makes no sense.
pub(super) fn read(path: &Path) -> Result<Vec<Job>, ConfigError> {
    let unreadable = |error: std::io::Error| {
        ConfigError::of_file(
            path,
            format!("cannot be read: {error}"),
            "a trace is named relative to its scenario; CSV, or CSV with gzip as .gz".into(),
        )
    };
    let file = File::open(path).map_err(unreadable)?;
    let zipped = path.extension().is_some_and(|extension| extension == "gz");
    let reader: Box<dyn Read> = if zipped { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
    let lines = BufReader::new(reader).lines().collect::<Result<Vec<String>, _>>().map_err(unreadable)?;
    if lines.first().is_some_and(|line| line.trim_start().starts_with('{')) { parse_log(path, &lines) } else { parse(path, &lines) }
}

/// Times that a log may have, in seconds since 1970: three thousand years, so that what is garbage is no time.
const SINCE_1970: RangeInclusive<f64> = 0.0..=1e11;
/// The most tokens of a prompt or an answer: sums of some still fit.
const MOST: Tokens = Tokens::MAX / 4;

/// What a line of the access log says of a request, as far as it says the same again in a simulation.
#[derive(Deserialize)]
struct Logged {
    /// When it was over.
    timestamp: String,
    reason: String,
    total_ms: f64,
    prompt_tokens: Option<Tokens>,
    output_tokens: Option<Tokens>,
    score: Option<f32>,
}

/// Reads what was answered from the log of `headway serve --log json`; all other lines are passed over.
fn parse_log(path: &Path, lines: &[String]) -> Result<Vec<Job>, ConfigError> {
    let mut requests: Vec<(f64, Job)> = Vec::new();
    for line in lines {
        let Ok(Logged { timestamp, reason, total_ms, prompt_tokens: Some(prompt), output_tokens: Some(output), score }) = serde_json::from_str(line)
        else {
            continue;
        };
        // What was cut off says nothing of its length.
        let arrived = seconds(&timestamp).map(|ended| ended - total_ms / 1e3).filter(|arrived| reason == "ok" && SINCE_1970.contains(arrived));
        if let Some(arrived) = arrived {
            let score = score.and_then(Score::new);
            requests.push((arrived, Job { score, ..Job::new(prompt.min(MOST), output.min(MOST)) }));
        }
    }
    requests.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(start) = requests.first().map(|(arrived, _)| *arrived) else {
        let hint = "a log has a line for each request if it is written by headway serve --log json";
        return Err(ConfigError::of_file(path, "there is no request".into(), hint.into()));
    };
    let at = |(arrived, job): (f64, Job)| Job { after: Duration::from_secs_f64(arrived - start), ..job };
    Ok(requests.into_iter().map(at).collect())
}

/// Seconds since 1970 of a time such as 2026-11-30T17:05:59.123456Z.
fn seconds(timestamp: &str) -> Option<f64> {
    let (date, time) = timestamp.strip_suffix('Z')?.split_once('T')?;
    let numbers = |text: &str, by: char| text.split(by).map(|part| part.parse::<f64>().ok()).collect::<Option<Vec<f64>>>();
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([year, month, day], [hours, minutes, second]) = (date[..].try_into().ok()?, time[..].try_into().ok()?);
    // Years begin in March, so that a leap day is the last of one.
    let (year, month): (f64, f64) = if month > 2.0 { (year, month - 3.0) } else { (year - 1.0, month + 9.0) };
    let leap_days = (year / 4.0).floor() - (year / 100.0).floor() + (year / 400.0).floor();
    let days = year * 365.0 + leap_days + ((153.0 * month + 2.0) / 5.0).floor() + day - 719_469.0;
    Some(days * 86_400.0 + hours * 3_600.0 + minutes * 60.0 + second)
}

fn parse(path: &Path, lines: &[String]) -> Result<Vec<Job>, ConfigError> {
    let wrong = |line: usize, message: String, hint: &str| {
        ConfigError::from(Problem { file: path.to_owned(), position: Some((line as u64 + 1, 1)), field: String::new(), message, hint: hint.into() })
    };
    let header: Vec<&str> = lines.first().map_or("", |line| line.as_str()).split(',').map(str::trim).collect();
    let column = |name: &str| header.iter().position(|column| *column == name);
    let needed = NEEDED.map(column);
    let [Some(arrival), Some(prompt), Some(output)] = needed else {
        let missing: Vec<&str> = NEEDED.into_iter().zip(needed).filter(|(_, at)| at.is_none()).map(|(name, _)| name).collect();
        let hint = "the first line names the columns: arrival_s,prompt_tokens,output_tokens and, if you have them, score and max_tokens";
        return Err(wrong(0, format!("there is no column {}", missing.join(" and no column ")), hint));
    };
    let mut jobs = Vec::with_capacity(lines.len());
    for (index, line) in lines.iter().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let number = |at: usize, highest: f64| fields.get(at)?.parse::<f64>().ok().filter(|number| (0.0..=highest).contains(number));
        let most = f64::from(Tokens::MAX / 4);
        let (Some(arrival), Some(prompt), Some(output)) = (number(arrival, 1e9), number(prompt, most), number(output, most)) else {
            return Err(wrong(index, format!("{line:?} is no request"), "write seconds, prompt tokens and output tokens, none of them negative"));
        };
        let mut job = Job::new(prompt as Tokens, output as Tokens);
        job.after = Duration::from_secs_f64(arrival);
        if let Some(at) = column(SCORE) {
            let score = fields.get(at).filter(|text| !text.is_empty()).map(|text| text.parse().ok().and_then(Score::new));
            job.score = match score {
                Some(None) => return Err(wrong(index, format!("the score of {line:?} is no number"), "leave it empty where there is none")),
                score => score.flatten(),
            };
        }
        if let Some(at) = column(LIMIT).filter(|at| fields.get(*at).is_some_and(|text| !text.is_empty())) {
            let limit = number(at, most).filter(|limit| *limit >= 1.0);
            let wrong =
                || wrong(index, format!("the limit of {line:?} is no number of tokens"), "write at least 1, or leave it empty where there is none");
            job.max_output = Some(limit.ok_or_else(wrong)? as Tokens);
        }
        jobs.push(job);
    }
    if jobs.is_empty() {
        return Err(wrong(0, "there is no request".into(), "one line for each, below the line with the columns' names"));
    }
    jobs.sort_by_key(|job| job.after);
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn lines(text: &str) -> Result<Vec<Job>, ConfigError> {
        parse(Path::new("t.csv"), &text.lines().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn columns_are_found_by_name() {
        let jobs = lines("score,output_tokens,arrival_s,x,prompt_tokens,max_tokens\n0.5,10,2.5,?,100,7\n,20,1,?,0,\n").unwrap();
        assert_eq!(jobs.iter().map(|job| (job.prompt, job.output)).collect::<Vec<_>>(), [(1, 20), (100, 10)], "by arrival");
        assert_eq!((jobs[0].max_output, jobs[1].max_output), (None, Some(7)));
        assert_eq!((jobs[1].after, jobs[1].score, jobs[0].score), (Duration::from_millis(2500), Score::new(0.5), None));
    }

    #[test]
    fn an_access_log_is_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("headway.log");
        let log = r#"{"timestamp":"2024-03-01T00:00:01.500000Z","level":"INFO","target":"access","reason":"ok","total_ms":2000.0,"prompt_tokens":70,"output_tokens":8,"score":0.25}
{"timestamp":"2024-03-01T00:00:01.6Z","level":"INFO","target":"headway","message":"reloaded"}
{"timestamp":"2024-02-29T23:59:59.750000Z","level":"INFO","target":"access","reason":"ok","total_ms":1250.0,"prompt_tokens":9,"output_tokens":3}
{"timestamp":"2024-03-01T00:00:02Z","level":"INFO","target":"access","reason":"queue_full","total_ms":0.1}
{"timestamp":"2024-03-01T00:00:03Z","target":"access","reason":"client_left","total_ms":9.0,"prompt_tokens":5,"output_tokens":5}
{"timestamp":"nan-1-1T0:0:0Z","target":"access","reason":"ok","total_ms":1e300,"prompt_tokens":5,"output_tokens":5}
"#;
        std::fs::write(&file, log).unwrap();
        let jobs = read(&file).unwrap();
        assert_eq!(jobs.iter().map(|job| (job.prompt, job.output)).collect::<Vec<_>>(), [(9, 3), (70, 8)], "by arrival, over the end of February");
        assert_eq!((jobs[1].after, jobs[1].score, jobs[0].score), (Duration::from_secs(1), Score::new(0.25), None));
        assert_eq!(seconds("2026-11-30T17:05:59.5Z"), Some(1_796_058_359.5));
        std::fs::write(&file, "{}\n").unwrap();
        assert!(read(&file).unwrap_err().to_string().contains("--log json"));
    }

    #[test]
    fn what_makes_no_sense_is_shown_with_its_line() {
        for (text, line, said) in [
            ("", 1, "no column arrival_s"),
            ("arrival_s,prompt_tokens\n", 1, "no column output_tokens"),
            ("arrival_s,prompt_tokens,output_tokens\n", 1, "no request"),
            ("arrival_s,prompt_tokens,output_tokens\n0,1,2\n0,-1,2\n", 3, "is no request"),
            ("arrival_s,prompt_tokens,output_tokens\n0,1\n", 2, "is no request"),
            ("arrival_s,prompt_tokens,output_tokens,score\n0,1,2,NaN\n", 2, "is no number"),
            ("arrival_s,prompt_tokens,output_tokens,max_tokens\n0,1,2,0\n", 2, "no number of tokens"),
        ] {
            let error = lines(text).unwrap_err();
            let problem = &error.problems()[0];
            assert!(problem.position == Some((line, 1)) && problem.message.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn plain_and_gzipped_files_are_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let text = "arrival_s,prompt_tokens,output_tokens\n0.5,7,8\n";
        let (plain, zipped) = (dir.path().join("t.csv"), dir.path().join("t.csv.gz"));
        std::fs::write(&plain, text).unwrap();
        let mut encoder = GzEncoder::new(File::create(&zipped).unwrap(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap();
        assert_eq!(read(&plain).unwrap(), read(&zipped).unwrap());
        assert!(read(&dir.path().join("none.csv")).unwrap_err().to_string().contains("cannot be read"));
    }
}
