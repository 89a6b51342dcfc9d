"""What a training loop holds: ``DiLoCo``, its presets, planning and evaluation."""
