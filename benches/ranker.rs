//! What scoring costs: CPU seconds per prompt of the encoder that serves on a CPU, beside the reference in candle and ONNX Runtime, in f32 with the shipped
//! weights, one thread each, in one run.
//!
//! `cargo bench --bench ranker`. ONNX Runtime runs in a child process (benches/ranker_onnx.py) and is left out without
//! `python3 -m venv target/onnx && target/onnx/bin/pip install onnx onnxruntime`.

use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use headway::ranker::PromptText;
use headway::ranker::encoder::Encoder;
use headway::ranker::model::{Config, Model};
use headway::ranker::tokenizer::{Pieces, Tokenizer, Truncation};

const REPEATS: usize = 9;
/// Pieces that are computed before the clock is read again.
const PIECES: usize = 2048;
const LENGTHS: [usize; 3] = [32, 64, 128];
const BATCHES: [usize; 2] = [1, 16];
/// Largest difference between two engines' scores of one prompt.
const TOLERANCE: f32 = 1e-4;

type Error = Box<dyn std::error::Error>;

/// Runs a batch so many times; returns CPU seconds of one run and the scores.
type Engine<'a> = Box<dyn FnMut(&[Pieces], usize) -> Result<(f64, Vec<f32>), Error> + 'a>;

fn main() -> Result<(), Error> {
    // `cargo test` runs benches too, with this flag, to see that they start.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = root.join("models/pars");
    let (encoder, model) = load(&directory)?;
    let mut engines: Vec<(String, Engine)> = vec![
        ("Headway".into(), Box::new(|batch, runs| timed(runs, || Ok(encoder.scores(batch)?)))),
        ("candle".into(), Box::new(|batch, runs| timed(runs, || Ok(model.forward(batch)?.to_vec1()?)))),
    ];
    match Onnx::start(root, &directory) {
        Ok((version, mut onnx)) => engines.push((format!("ONNX Runtime {version}"), Box::new(move |batch, runs| onnx.run(batch, runs)))),
        Err(error) => {
            eprintln!("ONNX Runtime is left out ({error}). To have it: python3 -m venv target/onnx && target/onnx/bin/pip install onnx onnxruntime")
        }
    }
    println!("| pieces | batch | engine | CPU ms a prompt, median of {REPEATS} (min..max) | Headway takes |\n|---|---|---|---|---|");
    for length in LENGTHS {
        for prompts in BATCHES {
            compare(&mut engines, length, prompts)?;
        }
    }
    tokenizer(&directory)
}

/// One case: a line per engine.
fn compare(engines: &mut [(String, Engine)], length: usize, prompts: usize) -> Result<(), Error> {
    let batch: Vec<Pieces> =
        (0..prompts).map(|seed| Pieces::of_ids((0..length).map(|at| 1996 + ((at * 37 + seed * 101) % 20_000) as u32).collect())).collect();
    let runs = PIECES.div_ceil(length * prompts);
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); engines.len()];
    let mut first: Option<Vec<f32>> = None;
    // Interleaved, so that a slow minute of the machine meets every engine.
    for _ in 0..REPEATS {
        for ((name, engine), seconds) in engines.iter_mut().zip(&mut seconds) {
            let (taken, scores) = engine(&batch, runs)?;
            seconds.push(taken / prompts as f64);
            let expected = first.get_or_insert_with(|| scores.clone());
            if expected.len() != scores.len() || expected.iter().zip(&scores).any(|(one, other)| (one - other).abs() > TOLERANCE) {
                return Err(format!("{name} scores {scores:?}, not {expected:?}").into());
            }
        }
    }
    for ((name, _), taken) in engines.iter().zip(&seconds) {
        let ratio = median(seconds[0].iter().zip(taken).map(|(headway, other)| headway / other));
        let milliseconds = |seconds: f64| seconds * 1e3;
        let (low, high) = (taken.iter().copied().fold(f64::MAX, f64::min), taken.iter().copied().fold(0.0, f64::max));
        println!(
            "| {length} | {prompts} | {name} | {:.2} ({:.2}..{:.2}) | {ratio:.2} x |",
            milliseconds(median(taken.iter().copied())),
            milliseconds(low),
            milliseconds(high)
        );
    }
    Ok(())
}

/// What comes before the encoder: text to pieces.
fn tokenizer(directory: &Path) -> Result<(), Error> {
    let tokenizer = Tokenizer::from_json(&std::fs::read(directory.join("tokenizer.json"))?, Truncation { pieces: 128, system: 12 })?;
    println!("\n| text, bytes | pieces | tokenizer, CPU ms |\n|---|---|---|");
    let words = "Explain to a beginner, step by step, how a transformer decides which of the words that it has read matter for the next one. ";
    for bytes in [128, 512, 4097] {
        let text = PromptText { system: String::new(), user: words.chars().cycle().take(bytes).collect() };
        let pieces = tokenizer.pieces(&text).len();
        let taken = (0..REPEATS)
            .map(|_| timed(200, || Ok(vec![tokenizer.pieces(&text).len() as f32])).map(|(seconds, _)| seconds))
            .collect::<Result<Vec<f64>, Error>>()?;
        println!("| {bytes} | {pieces} | {:.3} |", median(taken.into_iter()) * 1e3);
    }
    Ok(())
}

fn load(directory: &Path) -> Result<(Encoder, Model), Error> {
    let config = Config::from_json(&std::fs::read(directory.join("config.json"))?)?;
    let mut tensors = candle_core::safetensors::load(directory.join("model.safetensors"), &Device::Cpu)?;
    for tensor in tensors.values_mut() {
        *tensor = tensor.to_dtype(DType::F32)?;
    }
    let values = |name: &str| tensors[name].flatten_all().and_then(|flat| flat.to_vec1());
    let encoder = Encoder::new(&config, |name, _| values(name).map_err(|error| headway::ranker::RankerError::Weights(error.to_string())))?;
    Ok((encoder, Model::new(&config, VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu))?))
}

/// CPU seconds of this process for one of so many runs, and what the last one returned.
fn timed(runs: usize, mut run: impl FnMut() -> Result<Vec<f32>, Error>) -> Result<(f64, Vec<f32>), Error> {
    let mut scores = Vec::new();
    let start = cpu_seconds();
    for _ in 0..runs {
        scores = run()?;
    }
    Ok(((cpu_seconds() - start) / runs as f64, scores))
}

/// What all threads of this process have run.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The child process; it ends when its input does.
struct Onnx {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Onnx {
    /// The running child and ONNX Runtime's version.
    fn start(root: &Path, directory: &Path) -> Result<(String, Onnx), Error> {
        let python: PathBuf = root.join("target/onnx/bin/python");
        let mut child = Command::new(&python)
            .arg(root.join("benches/ranker_onnx.py"))
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", python.display()))?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("no standard output")?);
        let mut onnx = Onnx { child, input, output: BufReader::new(output) };
        let version = onnx.answer()?["version"].as_str().unwrap_or_default().to_owned();
        Ok((version, onnx))
    }

    fn run(&mut self, batch: &[Pieces], runs: usize) -> Result<(f64, Vec<f32>), Error> {
        let prompts: Vec<&[u32]> = batch.iter().map(Pieces::ids).collect();
        let input = self.input.as_mut().ok_or("no standard input")?;
        writeln!(input, "{}", serde_json::json!({"prompts": prompts, "repeat": runs}))?;
        let answer = self.answer()?;
        let seconds = answer["seconds"].as_f64().ok_or("no seconds")?;
        Ok((seconds, serde_json::from_value(answer["scores"].clone())?))
    }

    fn answer(&mut self) -> Result<serde_json::Value, Error> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Onnx {
    fn drop(&mut self) {
        self.input = None;
        // Nothing to report: it has been measured.
        let _ = self.child.wait();
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
