//! A roofline of a neural processing unit that runs a nested model (PMPD, arXiv 2410.13461,
//! appendix A.6).
//!
//! A layer takes the longer of two times: its products at `macs` multiply-accumulates a clock, or
//! the bytes that it reads at `bandwidth`. A pass of the prompt reads every matrix once for all its
//! tokens; a decode step reads it once for one token, and all keys and values so far. What is
//! assumed: weights of any number of bits are expanded on the way, at no cost; products take the
//! same time at every precision; keys and values have 16 bits; the embedding's rows, norms and the
//! softmax take no time; nothing is kept on the chip from one layer to the next.

use fracbit_base::Rate;
use fracbit_io::ModelConfig;
use fracbit_load::Error;
use fracbit_model::LinearId;
use fracbit_schedule::{Phase, Schedule};
use serde::Serialize;

/// A processing unit and what it does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Npu {
    /// Multiply-accumulates of a clock.
    pub macs: f64,
    /// Clocks a second.
    pub clock: f64,
    /// Bytes a second from memory.
    pub bandwidth: f64,
}

/// Times of one text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simulated {
    /// What steps read: `16` bits, or a schedule.
    pub schedule: Schedule,
    /// Seconds of the prompt.
    pub prefill: f64,
    /// Seconds of the answer.
    pub decode: f64,
    /// Texts a second beside those of 16 bits everywhere.
    pub speedup: f64,
}

/// The time of a text of `prompt` and `answer` tokens in 16 bits, then by each of `schedules`.
///
/// # Errors
/// When a number of the processing unit is not positive.
pub fn simulate(
    config: &ModelConfig,
    npu: Npu,
    prompt: usize,
    answer: usize,
    schedules: &[Schedule],
) -> Result<Vec<Simulated>, Error> {
    for (option, number) in [("--macs", npu.macs), ("--clock", npu.clock), ("--bandwidth", npu.bandwidth)] {
        if !(number.is_finite() && number > 0.0) {
            let rule = format!("should be a positive number, got {number}");
            return Err(Error::Option { option, rule });
        }
    }
    let run = |schedule: &Schedule| {
        let prefill = pass(config, npu, prompt, prompt, schedule.precision(Phase::Prefill));
        let step = |i: usize| pass(config, npu, 1, prompt + i + 1, schedule.precision(Phase::Decode(i)));
        // The first token of the answer comes out of the prompt's pass.
        let decode: f64 = (0..answer.saturating_sub(1)).map(step).sum();
        (prefill, decode)
    };
    let half = Schedule::uniform(Rate::quarter_bits(64));
    let (first, rest) = run(&half);
    let of = |schedule: &Schedule| {
        let (prefill, decode) = run(schedule);
        let speedup = (first + rest) / (prefill + decode);
        Simulated { schedule: schedule.clone(), prefill, decode, speedup }
    };
    Ok([&half].into_iter().chain(schedules).map(of).collect())
}

/// Seconds of a pass of `tokens` tokens, with `context` tokens of keys and values at its end.
#[expect(clippy::cast_precision_loss, reason = "counts of operations and bytes")]
fn pass(config: &ModelConfig, npu: Npu, tokens: usize, context: usize, precision: Rate) -> f64 {
    let longer = |macs: f64, bytes: f64| (macs / (npu.macs * npu.clock)).max(bytes / npu.bandwidth);
    let mut seconds = 0.0;
    // Logits are wanted of the last token alone.
    let head = if config.tie_word_embeddings { LinearId::Embed } else { LinearId::Head };
    for id in LinearId::all(config).filter(|&id| id != LinearId::Embed || id == head) {
        let weights = id.shape(config).len() as f64;
        let rows = if id == head { 1.0 } else { tokens as f64 };
        // One token meets some of the experts; a prompt meets all.
        let share = id.active_share(config);
        let read = if tokens == 1 { share } else { 1.0 };
        seconds += longer(weights * share * rows, weights * read * precision.bits() / 8.0);
    }
    let pairs = (2 * context * config.kv_dim()) as f64;
    for _ in 0..config.num_hidden_layers() {
        let attended = (2 * tokens * config.q_dim()) as f64 * context as f64;
        seconds += longer(attended, 2.0 * pairs);
    }
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vicuna() -> ModelConfig {
        let json = r#"{"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "hidden_act": "silu"}"#;
        ModelConfig::parse(json.as_bytes(), "config.json".as_ref()).unwrap()
    }

    fn speedups(prompt: usize, answer: usize, schedules: &[&str]) -> Vec<f64> {
        let schedules: Vec<Schedule> = schedules.iter().map(|s| s.parse().unwrap()).collect();
        let npu = Npu { macs: 16384.0, clock: 1e9, bandwidth: 32e9 };
        let made = simulate(&vicuna(), npu, prompt, answer, &schedules).unwrap();
        made.iter().map(|one| one.speedup).collect()
    }

    /// Figure of the papers' appendix for Vicuna-7B, 3 to 2 bits: 4.9 to 5.3 times for three bits
    /// everywhere, 5.9 to 8.0 for schedules.
    #[test]
    fn the_order_of_the_paper_comes_out() {
        for (prompt, answer, switch) in [(600, 120, 40), (200, 33, 11), (60, 60, 20)] {
            let falling = format!("prefill=3,decode=3..2@{switch}");
            let found = speedups(prompt, answer, &["3", &falling, "2"]);
            assert_eq!(found[0], 1.0);
            assert!((4.0..=5.34).contains(&found[1]), "{prompt} {answer}: {found:?}");
            assert!((5.0..=8.0).contains(&found[2]) && found[2] < found[3], "{prompt} {answer}: {found:?}");
        }
        // Longer answers gain more of falling precision.
        let gain = |answer| {
            let found = speedups(200, answer, &["3", "prefill=3,decode=3..2@16"]);
            found[2] / found[1]
        };
        assert!(gain(32) < gain(128) && gain(128) < gain(512));
    }

    #[test]
    fn a_step_is_bytes_and_a_prompt_is_products() {
        let config = vicuna();
        let npu = Npu { macs: 4096.0, clock: 1e9, bandwidth: 32e9 };
        let weights: usize = LinearId::all(&config)
            .filter(|&id| id != LinearId::Embed)
            .map(|id| id.shape(&config).len())
            .sum();
        let step = pass(&config, npu, 1, 1, Rate::quarter_bits(16));
        let bytes = weights as f64 / 2.0 + 32.0 * 4.0 * 4096.0;
        assert!((step * npu.bandwidth / bytes - 1.0).abs() < 1e-9);
        let prompt = pass(&config, npu, 1024, 1024, Rate::quarter_bits(8));
        let macs = (weights - 32000 * 4096) as f64 * 1024.0 + 32.0 * 2.0 * 1024.0 * 1024.0 * 4096.0;
        let head = 32000.0 * 4096.0 / 4.0 / npu.bandwidth;
        assert!((prompt / (macs / 4096e9 + head) - 1.0).abs() < 1e-9);
        let none = simulate(&config, Npu { macs: 0.0, ..npu }, 1, 1, &[]);
        assert!(matches!(none, Err(Error::Option { option: "--macs", .. })));
    }
}
